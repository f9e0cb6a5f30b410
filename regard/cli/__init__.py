"""The commands of `regard`, one file each; `regard.cli` finds them by name."""
