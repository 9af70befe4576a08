package pgfence;

import java.sql.SQLException;
import java.util.ArrayDeque;
import java.util.Arrays;
import java.util.Collections;
import java.util.Deque;
import java.util.IdentityHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import org.postgresql.util.PSQLException;
import org.postgresql.util.ServerErrorMessage;

/** Everything that pg_fence and its client refuse or tell. */
@SuppressWarnings("serial")
public abstract sealed class FenceException extends RuntimeException {
    /** The server's, or null. */
    private final String sqlState;
    private final transient ServerErrorMessage server;
    /** Whether it was the commit that failed. */
    private boolean inDoubt;

    private FenceException(String message, SQLException cause) {
        super(message, cause);
        sqlState = cause == null ? null : cause.getSQLState();
        server = cause instanceof PSQLException told ? told.getServerErrorMessage() : null;
    }

    /** The SQLSTATE; null where the server has not said it. */
    public String sqlState() {
        return sqlState;
    }

    /**
     * What the server said beside: {@code presented}, {@code stored}, {@code lease}, {@code holder}; empty where it
     * said nothing.
     */
    public Map<String, Object> detail() {
        return Json.object(server == null ? null : server.getDetail());
    }

    /** What to do; null where the server has not said it. */
    public String hint() {
        return server == null ? null : server.getHint();
    }

    /** Whether it was the commit that failed: then the transaction may have landed all the same. */
    public boolean inDoubt() {
        return inDoubt;
    }

    /** Whether the server has refused a write or a guard. */
    final boolean isRefusal() {
        return sqlState != null && sqlState.startsWith("PF");
    }

    void setInDoubt() {
        inDoubt = true;
    }

    /** PF001: the row has seen the same or a greater token. The lease is lost: stop. */
    public static final class StaleToken extends FenceException {
        StaleToken(SQLException cause) {
            super(messageOf(cause), cause);
        }
    }

    /** PF002: the write presented no token. It ran outside of {@code guard} and {@code present}. */
    public static final class NoToken extends FenceException {
        NoToken(SQLException cause) {
            super(messageOf(cause), cause);
        }
    }

    /** PF003: this database never issued that token. */
    public static final class NeverIssued extends FenceException {
        NeverIssued(SQLException cause) {
            super(messageOf(cause), cause);
        }
    }

    /** PF004: the token does not speak for the lease. */
    public static final class NotSpeaking extends FenceException {
        NotSpeaking(SQLException cause) {
            super(messageOf(cause), cause);
        }
    }

    /** PF005: a statement that cannot be fenced (TRUNCATE). */
    public static final class CannotBeFenced extends FenceException {
        CannotBeFenced(SQLException cause) {
            super(messageOf(cause), cause);
        }
    }

    /** The session has ended under the transaction. The lease may well be held still. */
    public static final class TransactionLost extends FenceException {
        TransactionLost(SQLException cause) {
            super("the session ended under the transaction: " + messageOf(cause), cause);
        }
    }

    /** An acquire was not answered in time: within a third of the ttl, beside its wait. */
    public static final class AcquireTimeout extends FenceException {
        AcquireTimeout(List<String> names, SQLException cause) {
            super("no answer to the acquire of " + String.join(", ", names) + " within a third of its ttl", cause);
        }
    }

    /** The database has no pg_fence, or has it in a schema where it is not found. */
    public static final class NotInstalled extends FenceException {
        NotInstalled(SQLException cause) {
            super("the extension pg_fence is not installed in this database (CREATE EXTENSION pg_fence), or its schema is "
                    + "not on the search_path (new Fence(…).inSchema(schema)): " + messageOf(cause), cause);
        }
    }

    /** Somebody else has the lease, and kept it for as long as we waited. */
    public static final class LeaseTaken extends FenceException {
        LeaseTaken(List<String> names) {
            super("the lease " + String.join(", ", names) + " is taken", null);
        }
    }

    /** The lease is ours no more: stop, and report no failure of the work. Somebody else may have it by now. */
    public static final class LeaseLost extends FenceException {
        /** Why. */
        private final Reason reason;
        /** Of the lease. */
        private final List<String> names;

        LeaseLost(Reason reason, List<String> names, SQLException cause) {
            super("the lease " + String.join(", ", names) + " is lost (" + reason + ")", cause);
            this.reason = reason;
            this.names = names;
        }

        /** Why it is lost. */
        public Reason reason() {
            return reason;
        }

        /** The names of the lease. */
        public List<String> names() {
            return names;
        }
    }

    /** Why a lease is ours no more. */
    public enum Reason {
        /** It could not be renewed in time. */
        DEADLINE,
        /** The server says so: it was taken over, revoked, or expired. */
        GONE,
        /** The server will not renew it, and trying again will not help. */
        DENIED,
        /** The session that it was bound to has ended. */
        SESSION,
        /** Its holder gave it back. */
        RELEASED;

        @Override
        public String toString() {
            return name().toLowerCase(java.util.Locale.ROOT);
        }
    }

    /**
     * The session, and with it the transaction, has ended: idle_in_transaction_session_timeout, transaction_timeout,
     * terminated, crashed, idle_session_timeout. And all of class 08.
     */
    private static final Set<String> ENDED = Set.of("25P03", "25P04", "57P01", "57P02", "57P05");

    private static final Set<String> PERMANENT = Set.of("22", "28", "3D", "3F", "42");

    /**
     * The typed error in what JDBC, Hibernate, Spring or jOOQ threw, however deep it is wrapped. Empty where it is no
     * business of pg_fence.
     */
    public static Optional<FenceException> classify(Throwable error) {
        Set<Throwable> seen = Collections.newSetFromMap(new IdentityHashMap<>());
        Deque<Throwable> next = new ArrayDeque<>();
        next.add(error);
        while (!next.isEmpty()) {
            Throwable one = next.remove();
            if (!seen.add(one)) {
                continue;
            }
            if (one instanceof FenceException found) {
                return Optional.of(found);
            }
            if (one instanceof SQLException sql) {
                FenceException found = typed(sql);
                if (found != null) {
                    return Optional.of(found);
                }
                // A batch has the server's error behind its own.
                if (sql.getNextException() != null) {
                    next.add(sql.getNextException());
                }
            }
            if (one.getCause() != null) {
                next.add(one.getCause());
            }
            next.addAll(Arrays.asList(one.getSuppressed()));
        }
        return Optional.empty();
    }

    private static FenceException typed(SQLException error) {
        String state = error.getSQLState() == null ? "" : error.getSQLState();
        return switch (state) {
            case "PF001" -> new StaleToken(error);
            case "PF002" -> new NoToken(error);
            case "PF003" -> new NeverIssued(error);
            case "PF004" -> new NotSpeaking(error);
            case "PF005" -> new CannotBeFenced(error);
            default -> ENDED.contains(state) || state.startsWith("08") ? new TransactionLost(error) : null;
        };
    }

    /** The typed error of a call of the client's own, or the error itself. */
    static Exception ofOwnCall(SQLException error) {
        String state = error.getSQLState() == null ? "" : error.getSQLState();
        return switch (state) {
            case "42883", "3F000" -> new NotInstalled(error);
            case "PF001" -> new StaleToken(error);
            default -> error;
        };
    }

    static <T> T typed(Fence.OwnCall<T> call) throws SQLException, InterruptedException {
        try {
            return call.get();
        } catch (SQLException error) {
            if (ofOwnCall(error) instanceof FenceException typed) {
                throw typed;
            }
            throw error;
        }
    }

    /** Whether an error says that the session has ended. */
    static boolean isEnd(SQLException error) {
        return typed(error) instanceof TransactionLost;
    }

    /** Whether a heartbeat that failed so will fail again, so that there is nothing to wait for. */
    static boolean isPermanent(SQLException error) {
        String state = error.getSQLState();
        return state != null
                && state.length() == 5
                && (PERMANENT.contains(state.substring(0, 2)) || state.equals("0A000") || state.equals("55000"));
    }

    private static String messageOf(SQLException error) {
        boolean isServers = error instanceof PSQLException told && told.getServerErrorMessage() != null;
        return isServers ? ((PSQLException) error).getServerErrorMessage().getMessage() : error.getMessage();
    }
}
