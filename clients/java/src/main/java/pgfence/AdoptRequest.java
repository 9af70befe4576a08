package pgfence;

import java.sql.SQLException;
import java.time.Duration;
import java.util.List;
import java.util.Optional;
import pgfence.FenceException.LeaseTaken;

/** How a lease is adopted: {@code fence.adopt("nightly", 33).acquire()}. */
public final class AdoptRequest {
    final Fence fence;
    final String name;
    final long token;
    Duration wait = Duration.ZERO;
    String holder = Attempt.uniqueHolder();
    String metadata;

    AdoptRequest(Fence fence, String name, long token) {
        this.fence = fence;
        this.name = name;
        this.token = token;
    }

    /** How long to wait for transactions that guard an older number: not at all, where it is not said. */
    public AdoptRequest waiting(Duration wait) {
        this.wait = wait;
        return this;
    }

    /** Who has it, for the view of all leases, in place of a text that is unique for each request. */
    public AdoptRequest holder(String holder) {
        this.holder = holder;
        return this;
    }

    /** An object of JSON, to be shown in the view of all leases. */
    public AdoptRequest metadata(String json) {
        metadata = json;
        return this;
    }

    /**
     * Makes the number known. An interrupt gives up.
     *
     * @throws LeaseTaken where a transaction guards an older number, and did so for as long as we waited: that one has
     *     ended all the same, and it is to be tried again
     * @throws FenceException.StaleToken where the name has had a greater number, or this one was released
     * @throws SQLException where the server refuses, or cannot be reached
     */
    public Adopted acquire() throws SQLException, InterruptedException {
        return tryAcquire().orElseThrow(() -> new LeaseTaken(List.of(name)));
    }

    /** As {@link #acquire}; empty where a transaction guards an older number. */
    public Optional<Adopted> tryAcquire() throws SQLException, InterruptedException {
        Adopted adopted = fence.make(this);
        return adopted.adopt() ? Optional.of(adopted) : Optional.empty();
    }
}
