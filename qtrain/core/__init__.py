"""What every room uses and that knows none of them: settings from recipe and flags, checks, errors, hardware."""
