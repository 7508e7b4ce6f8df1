"""What nodes say to each other and make of it; knows nothing of Flower, networks or folders."""
