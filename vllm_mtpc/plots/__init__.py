"""Figures of heads and of measurements, drawn by matplotlib."""
