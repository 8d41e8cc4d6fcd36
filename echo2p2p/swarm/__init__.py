"""Who is there, and how bytes and records reach them."""
