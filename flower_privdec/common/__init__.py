"""Text, files, arguments and the machine: helpers that know nothing of learning."""
