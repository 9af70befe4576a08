package pgfence;

import java.lang.System.Logger.Level;
import java.sql.Connection;
import java.sql.SQLException;
import java.time.Duration;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
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
public class Adopted extends Holding {
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

    Adopted(AdoptRequest request) {
        super(request.fence, List.of(request.name));
        this.request = request;
        token = request.token;
    }

    /** Makes the number known; false where an older one is guarded still. An interrupt gives up. */
    boolean adopt() throws SQLException, InterruptedException {
        return adopt(request.wait, true);
    }

    private boolean adopt(Duration wait, boolean mayGiveUp) throws SQLException, InterruptedException {
        Long adopted = call(own -> own.call(LIMIT + wait.toNanos(), fence.select(ADOPT), request.name, token,
                request.holder, Sql.interval(wait), request.metadata), mayGiveUp);
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
        try {
            if (call(own -> own.callWithin(LIMIT, onNames("lease_release"), name(), token), false) == null) {
                lose(Reason.GONE, null);
            }
        } catch (SQLException | InterruptedException error) {
            LOG.log(Level.WARNING, "the lease {0} was not released: {1}", request.name, error.getMessage());
        }
    }

    @Override
    final void lose(Reason reason, SQLException cause) {
        loss = new LeaseLost(reason, names(), cause);
        LOG.log(Level.WARNING, loss.getMessage());
    }

    // Its calls

    @FunctionalInterface
    private interface Call {
        Long on(OwnConnection own) throws SQLException;
    }

    /** Does it in a thread of its own, so that it can be given up, and broken off where it takes too long. */
    private Long call(Call call, boolean mayGiveUp) throws SQLException, InterruptedException {
        OwnConnection own = new OwnConnection(fence::open);
        FutureTask<Long> task = new FutureTask<>(() -> {
            try {
                return call.on(own);
            } finally {
                own.close();
            }
        });
        Thread thread = Sql.daemon("pg_fence " + request.name, task);
        thread.start();
        boolean wasInterrupted = false;
        while (!task.isDone()) {
            try {
                task.get(Clock.LOOK_AGAIN, TimeUnit.NANOSECONDS);
            } catch (TimeoutException later) {
                own.cutIfLate();
            } catch (ExecutionException failed) {
                break;
            } catch (InterruptedException givenUp) {
                if (mayGiveUp) {
                    // One that comes all the same stays: the service has granted the lease.
                    Sql.daemon("pg_fence cancel", () -> cancel(own, task)).start();
                    throw givenUp;
                }
                wasInterrupted = true;
            }
        }
        Sql.join(thread);
        if (wasInterrupted) {
            Thread.currentThread().interrupt();
        }
        return outcome(task);
    }

    private static void cancel(OwnConnection own, FutureTask<Long> task) {
        while (!task.isDone()) {
            own.cancel();
            try {
                // A request that comes before the statement does is lost, hence more than one.
                task.get(OwnConnection.CANCEL_AGAIN, TimeUnit.NANOSECONDS);
            } catch (TimeoutException again) {
                own.cutIfLate();
            } catch (ExecutionException | InterruptedException ended) {
                return;
            }
        }
    }

    private static Long outcome(FutureTask<Long> task) throws SQLException {
        try {
            return task.get();
        } catch (ExecutionException failed) {
            Throwable error = failed.getCause();
            if (FenceException.classify(error).orElse(null) instanceof StaleToken stale) {
                throw stale;
            } else if (error instanceof SQLException sql) {
                throw sql;
            }
            throw new IllegalStateException(error);
        } catch (InterruptedException itIsDone) {
            throw new IllegalStateException(itIsDone);
        }
    }

    // For the transactions under it

    @Override
    void guardOne(Connection connection, String name) throws SQLException {
        // Each transaction makes the number known: a failover may have lost it, and then silences it in any case.
        String guard = fence.select("lease_guard(?, (" + fence.select(ADOPT) + "))");
        Sql.value(connection, guard, name, name, token, request.holder, null, request.metadata);
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
    final void hasBeenReleased() {
        isOver.set(true);
    }
}
