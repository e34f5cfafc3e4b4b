"""Files of many formats as texts with marks, and back."""
