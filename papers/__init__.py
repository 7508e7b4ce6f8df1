"""Publications whose experiments are reproduced with stratafl."""
