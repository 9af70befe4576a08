package pgfence;

import java.io.PrintWriter;
import java.lang.reflect.InvocationHandler;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;
import java.sql.Connection;
import java.sql.SQLException;
import java.sql.SQLFeatureNotSupportedException;
import java.sql.Statement;
import java.util.Set;
import java.util.logging.Logger;
import javax.sql.DataSource;
import org.postgresql.core.BaseConnection;
import org.postgresql.core.TransactionState;

/**
 * A data source whose every transaction presents a token. The token is set for one transaction at a time, never for the
 * session, which behind a pooler is others', too.
 */
final class Presenting implements DataSource {
    private final Holding lease;
    private final DataSource source;

    Presenting(Holding lease, DataSource source) {
        this.lease = lease;
        this.source = source;
    }

    @Override
    public Connection getConnection() throws SQLException {
        return presenting(source.getConnection());
    }

    @Override
    public Connection getConnection(String user, String password) throws SQLException {
        return presenting(source.getConnection(user, password));
    }

    private Connection presenting(Connection connection) throws SQLException {
        try {
            Fence.refuseForeign(connection);
            lease.enter(connection);
        } catch (SQLException | RuntimeException error) {
            connection.close();
            throw error;
        }
        return proxy(Connection.class, new OnConnection(connection));
    }

    private static <T> T proxy(Class<T> type, InvocationHandler handler) {
        return type.cast(Proxy.newProxyInstance(Presenting.class.getClassLoader(), new Class<?>[] {type}, handler));
    }

    private static Object invoke(Object target, Method method, Object[] arguments) throws Throwable {
        try {
            return method.invoke(target, arguments);
        } catch (InvocationTargetException error) {
            throw error.getCause();
        }
    }

    private final class OnConnection implements InvocationHandler {
        private final Connection connection;

        OnConnection(Connection connection) {
            this.connection = connection;
        }

        @Override
        public Object invoke(Object self, Method method, Object[] arguments) throws Throwable {
            switch (method.getName()) {
                case "close", "abort" -> lease.leave(connection);
                case "createStatement", "prepareStatement", "prepareCall" -> lease.refuseIfOver();
                case "equals" -> {
                    return self == arguments[0];
                }
                // It begins the transaction by itself.
                case "setSavepoint" -> beginPresenting();
                default -> {
                }
            }
            Object result = Presenting.invoke(connection, method, arguments);
            if (result instanceof Statement statement) {
                return proxy(method.getReturnType().asSubclass(Statement.class), new OnStatement(this, self, statement));
            }
            return result;
        }

        /** In a transaction that presents the token, which in autocommit begins and ends here. */
        Object execute(Statement statement, Method method, Object[] arguments) throws Throwable {
            try {
                lease.refuseIfOver();
                if (lease.isInDoubt()) {
                    lease.mend();
                }
                return connection.getAutoCommit()
                        ? executeAlone(statement, method, arguments)
                        : executeWithin(statement, method, arguments);
            } catch (SQLException error) {
                if (lease.loss() != null) {
                    throw lease.lost(error);
                }
                if (Set.of("PF001", "PF004").contains(String.valueOf(error.getSQLState()))) {
                    lease.beatSoon();
                }
                throw error;
            }
        }

        private Object executeWithin(Statement statement, Method method, Object[] arguments) throws Throwable {
            beginPresenting();
            return Presenting.invoke(statement, method, arguments);
        }

        private Object executeAlone(Statement statement, Method method, Object[] arguments) throws Throwable {
            // The driver would leave rows for later, which the end of the transaction takes away.
            int fetchSize = statement.getFetchSize();
            statement.setFetchSize(0);
            connection.setAutoCommit(false);
            try {
                lease.beginPresenting(connection);
                Object result = Presenting.invoke(statement, method, arguments);
                connection.commit();
                return result;
            } catch (Throwable error) {
                if (!connection.isClosed()) {
                    connection.rollback();
                }
                throw error;
            } finally {
                if (!connection.isClosed()) {
                    connection.setAutoCommit(true);
                }
                if (!statement.isClosed()) {
                    statement.setFetchSize(fetchSize);
                }
            }
        }

        /** In the middle of a transaction it would be in vain, and no harm. */
        private void beginPresenting() throws SQLException {
            boolean isKnown = connection.isWrapperFor(BaseConnection.class);
            if (!isKnown || connection.unwrap(BaseConnection.class).getTransactionState() == TransactionState.IDLE) {
                lease.beginPresenting(connection);
            }
        }
    }

    private static final class OnStatement implements InvocationHandler {
        private final OnConnection owner;
        private final Object connection;
        private final Statement statement;

        OnStatement(OnConnection owner, Object connection, Statement statement) {
            this.owner = owner;
            this.connection = connection;
            this.statement = statement;
        }

        @Override
        public Object invoke(Object self, Method method, Object[] arguments) throws Throwable {
            if (method.getName().startsWith("execute")) {
                return owner.execute(statement, method, arguments);
            }
            return switch (method.getName()) {
                case "getConnection" -> connection;
                case "equals" -> self == arguments[0];
                default -> Presenting.invoke(statement, method, arguments);
            };
        }
    }

    // As the source says

    @Override
    public PrintWriter getLogWriter() throws SQLException {
        return source.getLogWriter();
    }

    @Override
    public void setLogWriter(PrintWriter out) throws SQLException {
        source.setLogWriter(out);
    }

    @Override
    public void setLoginTimeout(int seconds) throws SQLException {
        source.setLoginTimeout(seconds);
    }

    @Override
    public int getLoginTimeout() throws SQLException {
        return source.getLoginTimeout();
    }

    @Override
    public Logger getParentLogger() throws SQLFeatureNotSupportedException {
        return source.getParentLogger();
    }

    @Override
    public <T> T unwrap(Class<T> type) throws SQLException {
        return type.isInstance(this) ? type.cast(this) : source.unwrap(type);
    }

    @Override
    public boolean isWrapperFor(Class<?> type) throws SQLException {
        return type.isInstance(this) || source.isWrapperFor(type);
    }
}
