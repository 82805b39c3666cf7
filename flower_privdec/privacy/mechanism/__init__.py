"""What each step releases, the noise it takes, and the event that it costs."""
