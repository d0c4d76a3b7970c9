"""What the stage `report` alone is made of: reading results, comparing them, rendering tables and pictures."""
