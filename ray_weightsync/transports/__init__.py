"""How bytes move. Each transport is a folder with a sender and a receiver side by side."""
