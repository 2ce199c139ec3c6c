"""What a running server's speculation does: `fetch` asks it, `engines` reads its answers, `observe` says what they mean."""
