"""What `ember doctor` looks at, part by part; each part works whether or not the daemon runs."""
