"""What the strategies that move weights share."""
