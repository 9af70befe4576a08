package pgfence;

import java.sql.SQLException;
import java.time.Duration;
import java.util.List;
import java.util.Optional;
import pgfence.FenceException.LeaseLost;
import pgfence.FenceException.LeaseTaken;

/** How a lease is asked for: {@code fence.lease("order:7").ttl(Duration.ofSeconds(30)).acquire()}. */
public final class LeaseRequest extends LeaseTerms<LeaseRequest> {
    final List<String> names;
    Duration wait = Duration.ZERO;
    boolean session;
    boolean reclaim;

    LeaseRequest(Fence fence, List<String> names) {
        super(fence);
        if (names.isEmpty()) {
            throw new IllegalArgumentException("a lease needs a name");
        }
        this.names = names;
    }

    /** How long to wait in line for it: not at all, where it is not said. */
    public LeaseRequest waiting(Duration wait) {
        if (wait.isNegative()) {
            throw new IllegalArgumentException("a wait is no shorter than nothing");
        }
        this.wait = wait;
        return this;
    }

    /** It ends with its session, too. Not through a pooler in transaction mode. */
    public LeaseRequest session() {
        session = true;
        return this;
    }

    /** Where that holder has it already, it gets a new grant at once. Nobody else may call itself so. */
    public LeaseRequest reclaim(String holder) {
        reclaim = true;
        return holder(holder);
    }

    /**
     * Acquires it. An interrupt gives up.
     *
     * @return the lease, which is kept until it is closed or lost
     * @throws LeaseTaken where it is taken, and stayed so for as long as we waited
     * @throws FenceException.AcquireTimeout where no answer came within a third of the ttl beside the wait
     * @throws FenceException.NotInstalled where the database has no pg_fence, or in another schema
     * @throws SQLException where the server refuses, or cannot be reached
     * @throws InterruptedException if interrupted; a grant that comes all the same is given back
     */
    public Lease acquire() throws SQLException, InterruptedException {
        return tryAcquire().orElseThrow(() -> new LeaseTaken(names));
    }

    /** As {@link #acquire}; empty where the lease is taken, and stayed so for as long as we waited. */
    public Optional<Lease> tryAcquire() throws SQLException, InterruptedException {
        return attempt().acquire();
    }

    /**
     * Goes on with a lease that another process has acquired, and handed over by {@link Lease#detach}. It is renewed at
     * once.
     *
     * @throws LeaseLost where the token no longer speaks for it
     * @throws SQLException where the server refuses, or cannot be reached
     * @throws InterruptedException if interrupted; the lease then ends at its ttl
     */
    public Lease resume(long token) throws SQLException, InterruptedException {
        return attempt().resume(token);
    }

    Attempt attempt() {
        if (names.size() > 1 && (shared || slots != 1 || reclaim)) {
            throw new IllegalArgumentException("several names at once are exclusive: no shared, slots or reclaim");
        }
        if (session && holdAtLeast != null) {
            throw new IllegalArgumentException("a session lease ends with its session: no holdAtLeast");
        }
        return new Attempt(this);
    }
}
