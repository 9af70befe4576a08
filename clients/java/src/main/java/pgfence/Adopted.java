package pgfence;

import java.lang.System.Logger.Level;
import java.sql.Connection;
import java.sql.SQLException;
import java.time.Duration;
import java.util.List;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import pgfence.FenceException.LeaseLost;
import pgfence.FenceException.LeaseTaken;
import pgfence.FenceException.NotSpeaking;
import pgfence.FenceException.Reason;
import pgfence.FenceException.StaleToken;

/**
 * A lease that somebody else grants, known here under the number that it has there. {@link AdoptRequest} makes it.
 *
 * <p>There is no heartbeat, no deadline, no thread and no connection: nothing has to be closed. In a try-with-resources
 * statement it is released at the end; the same number is refused from then on.
 */
public non-sealed class Adopted extends Holding {
    /** How long a call may take beside its wait: a third of the usual ttl, for an adopted lease has none. */
    private static final long LIMIT = TimeUnit.SECONDS.toNanos(10);

    /**
     * A guard that cannot begin so may after an adoption in a transaction of its own: its own was NULL (22004), or
     * cannot be relied on in the same transaction, at REPEATABLE READ (55000).
     */
    private static final Set<String> MENDABLE = Set.of("22004", "55000");

    private static final String ADOPT = "lease_adopt(?, ?, ?, ?::interval, ?::jsonb)";

    private final AdoptRequest request;
    private final AtomicBoolean isOver = new AtomicBoolean();
    private volatile boolean isInDoubt;
    private volatile LeaseLost loss;

    Adopted(AdoptRequest request) {
        super(request.fence, List.of(request.name));
        this.request = request;
    }

    @Override
    public final long token() {
        return request.token;
    }

    @Override
    public final LeaseLost loss() {
        return loss;
    }

    private String name() {
        return request.name;
    }

    /** Makes the number known; false where an older one is guarded still. An interrupt gives up. */
    boolean adopt() throws SQLException, InterruptedException {
        return adopt(request.wait, true);
    }

    private boolean adopt(Duration wait, boolean mayGiveUp) throws SQLException, InterruptedException {
        // One that comes all the same after its caller has given up stays: the service has granted the lease.
        Separate<Long> call = new Separate<>(fence, (own, self) -> own.value(LIMIT + Clock.nanos(wait),
                fence.select(ADOPT), name(), token(), request.holder, Sql.interval(wait), request.metadata));
        Long adopted = FenceException.typed(mayGiveUp ? call::get : call::getUninterruptibly);
        if (adopted != null) {
            isInDoubt = false;
        }
        return adopted != null;
    }

    /** Gives it back: the number is refused from then on. No error where that fails: then it stays until a greater one. */
    @Override
    public final void release() {
        if (isOver.getAndSet(true)) {
            return;
        }
        Separate<Long> call = new Separate<>(fence, (own, self) -> own.transaction(LIMIT, LIMIT,
                on -> Sql.value(on, fence.select("lease_release(?, ?)"), name(), token())));
        try {
            if (call.getUninterruptibly() == null) {
                loss = new LeaseLost(Reason.GONE, names(), null);
                LOG.log(Level.WARNING, loss.getMessage());
                fence.telemetry().lost(loss);
            }
        } catch (SQLException error) {
            LOG.log(Level.WARNING, "the lease {0} was not released: {1}", name(), error.getMessage());
        }
    }

    // For the transactions under it

    @Override
    void beginGuarding(Connection connection) throws SQLException {
        // Each transaction makes the number known: a failover may have lost it, and then silences it in any case.
        String guard = fence.select("lease_guard(?, (" + fence.select(ADOPT) + "))");
        Sql.value(connection, guard, name(), name(), token(), request.holder, null, request.metadata);
    }

    @Override
    final void refuseIfOver() {
        if (isOver.get() || loss != null) {
            throw lost(null);
        }
    }

    @Override
    final boolean isInDoubt() {
        return isInDoubt;
    }

    @Override
    final boolean canMend(Throwable error) {
        return error instanceof NotSpeaking || error instanceof SQLException sql && MENDABLE.contains(sql.getSQLState());
    }

    @Override
    boolean mend() throws SQLException {
        try {
            if (!adopt(Duration.ZERO, false)) {
                throw new LeaseTaken(names());
            }
            return true;
        } catch (InterruptedException nobodyDoes) {
            throw new IllegalStateException(nobodyDoes);
        }
    }

    @Override
    final void beatSoon() {
        isInDoubt = true;
    }

    @Override
    final void releaseBy(Connection connection) throws SQLException {
        if (Sql.value(connection, fence.select("lease_release(?, ?)"), name(), token()) == null) {
            loss = new LeaseLost(Reason.GONE, names(), null);
            throw lost(null);
        }
    }

    @Override
    final void hasBeenReleased() {
        isOver.set(true);
    }
}
