"""Convolutions and pooling of images, and how filters are packed for them."""
