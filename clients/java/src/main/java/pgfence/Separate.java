package pgfence;

import java.sql.SQLException;
import java.util.concurrent.CancellationException;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/**
 * A call on a connection and in a thread of its own, for it may wait. The caller can give it up, and breaks it off when
 * it takes longer than it may.
 */
final class Separate<T> {
    /** A request to cancel that comes before the statement does is lost, hence more than one. */
    private static final long CANCEL_AGAIN = TimeUnit.SECONDS.toNanos(1);

    @FunctionalInterface
    interface Step<T> {
        T on(OwnConnection own, Separate<T> call) throws SQLException;
    }

    private final OwnConnection own;
    private final FutureTask<T> task;
    private boolean isGivenUp;
    private boolean isDelivered;

    Separate(Fence fence, Step<T> step) {
        own = new OwnConnection(fence::open, () -> {});
        task = new FutureTask<>(() -> {
            try {
                return step.on(own, this);
            } finally {
                own.close();
            }
        });
    }

    /** An interrupt gives up. Throws CancellationException where somebody else has given up. */
    T get() throws SQLException, InterruptedException {
        return get(true);
    }

    /** Goes on through an interrupt. */
    T getUninterruptibly() throws SQLException {
        try {
            return get(false);
        } catch (InterruptedException never) {
            throw new IllegalStateException(never);
        }
    }

    private T get(boolean mayGiveUp) throws SQLException, InterruptedException {
        Thread thread = Sql.daemon("pg_fence call", task);
        thread.start();
        boolean wasInterrupted = false;
        try {
            while (true) {
                try {
                    long pause = Math.min(Math.max(own.cutAt() - Clock.now(), 1_000_000), Clock.LOOK_AGAIN);
                    T value = task.get(pause, TimeUnit.NANOSECONDS);
                    refuseGivenUp();
                    return value;
                } catch (TimeoutException later) {
                    refuseGivenUp();
                    own.cutIfLate();
                } catch (ExecutionException failed) {
                    refuseGivenUp();
                    throw outcome(failed.getCause());
                } catch (InterruptedException interrupt) {
                    if (mayGiveUp && giveUp()) {
                        throw interrupt;
                    }
                    // What was granted is the caller's: told of the interrupt after it.
                    wasInterrupted = true;
                }
            }
        } finally {
            if (wasInterrupted) {
                Thread.currentThread().interrupt();
            }
        }
    }

    private static SQLException outcome(Throwable error) {
        if (error instanceof RuntimeException other) {
            throw other;
        }
        return error instanceof SQLException sql ? sql : new SQLException(error);
    }

    private synchronized void refuseGivenUp() {
        if (isGivenUp) {
            throw new CancellationException("given up");
        }
    }

    /** Hands over what the call has brought, unless its caller has given up. */
    synchronized boolean deliver(Runnable handOver) {
        if (!isGivenUp) {
            isDelivered = true;
            handOver.run();
        }
        return !isGivenUp;
    }

    synchronized boolean isGivenUp() {
        return isGivenUp;
    }

    /** False where it is too late: what was asked for was handed over. */
    synchronized boolean giveUp() {
        if (!isDelivered && !isGivenUp) {
            isGivenUp = true;
            Sql.daemon("pg_fence cancel", this::cancel).start();
        }
        return isGivenUp;
    }

    private void cancel() {
        while (!task.isDone()) {
            own.cancel();
            try {
                task.get(CANCEL_AGAIN, TimeUnit.NANOSECONDS);
            } catch (TimeoutException again) {
                own.cutIfLate();
            } catch (ExecutionException | InterruptedException ended) {
                return;
            }
        }
    }
}
