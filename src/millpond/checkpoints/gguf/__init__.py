"""GGUF: the files of llama.cpp, read as the checkpoints that they were converted from."""
