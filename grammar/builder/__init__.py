"""What a request asks its answer to be, made one grammar, and the answer's text read back."""
