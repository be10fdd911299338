"""What commands accept: options, flags, texts, signals."""
