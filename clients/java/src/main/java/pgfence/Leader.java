package pgfence;

import java.time.Instant;

/**
 * Who has a lease, as the server says.
 *
 * @param holder what the holder calls itself
 * @param token the first of its grant, which stays the same while it is renewed: {@link Lease#token} of who leads
 * @param since when the lease was acquired, by the server's clock
 */
public record Leader(String holder, long token, Instant since) {}
