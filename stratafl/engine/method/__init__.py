"""Methods of getting many clients' gradients: what they share, and which a module allows."""
