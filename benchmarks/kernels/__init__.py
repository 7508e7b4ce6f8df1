"""Every kernel held against PyTorch in float64, on the machine it is to run on."""
