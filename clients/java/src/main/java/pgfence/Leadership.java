package pgfence;

import java.sql.SQLException;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.CancellationException;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import pgfence.FenceException.LeaseLost;
import pgfence.FenceException.NotSpeaking;
import pgfence.FenceException.StaleToken;

/** How to lead: {@code fence.leadership("scheduler").onLeader(…).run(lease -> …)}, and {@link #stop} from elsewhere. */
public final class Leadership {
    private final Fence fence;
    private final String name;
    private Duration ttl = Duration.ofSeconds(30);
    private Consumer<Optional<Leader>> onLeader;
    private boolean isStopped;
    /** What {@link #stop} ends: the wait in line, or the work's lease. */
    private Attempt waiting;
    private Lease leading;

    Leadership(Fence fence, String name) {
        this.fence = fence;
        this.name = name;
    }

    /** How long the lease is held without a renewal: 30 s, where nothing else is said; at least 100 ms. */
    public Leadership ttl(Duration ttl) {
        this.ttl = LeaseTerms.checked(ttl);
        return this;
    }

    /**
     * Told who leads now, and at each change, while {@link #run} goes on; {@link Leader#token} is that of our own lease
     * where it is we who lead. Called from another thread; empty where nobody leads.
     */
    public Leadership onLeader(Consumer<Optional<Leader>> tell) {
        onLeader = tell;
        return this;
    }

    /**
     * Does {@code work} while leading, and again after each loss.
     *
     * @return what it returned once it came to its end; null where {@link #stop} ended it
     * @throws E from the work, where it was no loss
     * @throws SQLException where the lease cannot be had, for good
     * @throws InterruptedException if interrupted, which ends it
     */
    public <T, E extends Exception> T run(Fence.Leading<T, E> work) throws E, SQLException, InterruptedException {
        Observation watching = onLeader == null ? null : fence.observe(name, onLeader);
        try {
            // If the answer to an acquire was lost, the unique name takes the grant over.
            String holder = Attempt.uniqueHolder();
            while (!isStopped()) {
                Lease lease = await(holder).orElse(null);
                if (lease == null) {
                    continue;
                }
                try (lease) {
                    return work.under(lease);
                } catch (Exception error) {
                    if (isStopped() && isLoss(lease, error)) {
                        return null;
                    }
                    if (error instanceof InterruptedException || !isLoss(lease, error)) {
                        throw error;
                    }
                    rest();
                } finally {
                    enter(null, null);
                }
            }
            return null;
        } finally {
            if (watching != null) {
                watching.close();
            }
        }
    }

    /** The lease, once it is ours; empty: try again, unless it is to stop. */
    private Optional<Lease> await(String holder) throws SQLException, InterruptedException {
        LeaseRequest request = fence.lease(name).ttl(ttl).waiting(portion()).reclaim(holder);
        Attempt attempt = request.attempt();
        if (!enter(attempt, null)) {
            return Optional.empty();
        }
        try {
            Optional<Lease> taken = attempt.acquire();
            if (taken.isPresent() && !enter(null, taken.get())) {
                taken.get().release();
                return Optional.empty();
            }
            return taken;
        } catch (CancellationException stopped) {
            return Optional.empty();
        } catch (FenceException.AcquireTimeout error) {
            return Optional.empty();
        } catch (SQLException error) {
            if (FenceException.isPermanent(error)) {
                throw error;
            }
            rest();
            return Optional.empty();
        }
    }

    /** In portions, for a lost answer. */
    private Duration portion() {
        return Duration.ofMillis(Math.min(Math.max(ttl.toMillis() / 3, 1000), 10_000));
    }

    /** Whether who leads tries again. */
    private static boolean isLoss(Lease lease, Exception error) {
        FenceException told = FenceException.classify(error).orElse(null);
        return lease.loss() != null
                || told instanceof LeaseLost
                || told instanceof StaleToken
                || told instanceof NotSpeaking;
    }

    /**
     * Ends it, from another thread: the wait in line is given up, and the work's lease is given back, so that its next
     * step throws LeaseLost. {@link #run} then returns null.
     */
    public void stop() {
        Attempt attempt;
        Lease lease;
        synchronized (this) {
            isStopped = true;
            attempt = waiting;
            lease = leading;
            notifyAll();
        }
        if (attempt != null) {
            attempt.giveUp();
        }
        if (lease != null) {
            lease.release();
        }
    }

    private synchronized boolean isStopped() {
        return isStopped;
    }

    /** What there is to stop; false where it was stopped already. */
    private synchronized boolean enter(Attempt attempt, Lease lease) {
        waiting = attempt;
        leading = lease;
        return !isStopped;
    }

    private synchronized void rest() throws InterruptedException {
        if (!isStopped) {
            wait(TimeUnit.NANOSECONDS.toMillis(Clock.nanos(ttl) / 12) + 1);
        }
    }
}
