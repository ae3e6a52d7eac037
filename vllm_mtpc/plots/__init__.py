"""Pictures of heads and of measurements, by matplotlib."""
