"""Models of Hugging Face transformers beside real daemons."""
