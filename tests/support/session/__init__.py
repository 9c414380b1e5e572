"""What pytest does around the tests: shares them among processes, watches what they leave, adds up their seconds."""
