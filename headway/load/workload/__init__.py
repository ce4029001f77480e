"""What is asked, and when: arrival processes, lengths, prompts, traces."""
