"""Systems of the attention study: their settings, data made by rules, training and export."""
