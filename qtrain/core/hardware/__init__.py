"""The one place that asks the device."""
