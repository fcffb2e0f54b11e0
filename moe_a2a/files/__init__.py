"""Files that moe_a2a reads and writes."""
