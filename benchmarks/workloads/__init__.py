"""What servers are asked, in tokens: documents with questions and conversations, from files or generated."""
