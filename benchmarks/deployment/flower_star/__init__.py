"""What is copied into a Flower app: federated averaging on a star, as Flower's users write it."""
