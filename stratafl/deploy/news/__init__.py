"""What is wrong at a site travels to the root, beside Flower's messages."""
