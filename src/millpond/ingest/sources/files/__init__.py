"""Files as people have them: text, Markdown, HTML, PDF, DOCX and code, read as records."""
