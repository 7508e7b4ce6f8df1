"""Speed of the engines beside plain PyTorch, JAX and the peak of the device."""
