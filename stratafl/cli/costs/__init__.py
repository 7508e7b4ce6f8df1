"""`stratafl price` and `stratafl networks`: what stored runs cost elsewhere."""
