"""What is built on a recurrent layer."""
