"""deepufm."""
