"""How fast the engines are: beside plain PyTorch and JAX, and beside what the device could do."""
