"""Models of Hugging Face: the look at one before its sequences are spread, and the checks around its calls."""
