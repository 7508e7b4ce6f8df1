"""What is copied into a Flower app: it must run without the rest of the package."""
