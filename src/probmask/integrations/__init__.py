"""Callbacks for the trainers of other libraries. Each module needs its library installed."""
