"""What a timeline says: in words, and as a picture."""
