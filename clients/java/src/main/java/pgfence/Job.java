package pgfence;

import java.sql.SQLException;

/** Something that the {@link Keeper}'s thread does by its connection, for somebody who waits for it. */
final class Job<T> {
    private static final String LOCK_NOT_AVAILABLE = "55P03";

    @FunctionalInterface
    interface Step<T> {
        T on(OwnConnection own, Job<T> self) throws SQLException;
    }

    private final Step<T> step;
    /** Until then it is tried again where somebody's open transaction is in its way. */
    final long until;
    long notBefore;
    private T value;
    private Exception failure;
    boolean isDone;
    boolean isGivenUp;

    Job(Step<T> step, long until) {
        this.step = step;
        this.until = until;
    }

    void run(OwnConnection own) {
        try {
            value = step.on(own, this);
            failure = null;
        } catch (SQLException | RuntimeException error) {
            failure = error;
        }
    }

    static boolean isLocked(Exception error) {
        return error instanceof SQLException sql && LOCK_NOT_AVAILABLE.equals(sql.getSQLState());
    }

    boolean mustWait() {
        return isLocked(failure) && Clock.now() < until;
    }

    T outcome() throws SQLException {
        if (failure instanceof SQLException sql) {
            throw sql;
        } else if (failure instanceof RuntimeException other) {
            throw other;
        }
        return value;
    }
}
