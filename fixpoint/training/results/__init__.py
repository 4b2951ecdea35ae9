"""Records of finished runs, and what is made of them."""
