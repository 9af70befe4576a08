package pgfence;

import java.io.IOException;
import java.io.InputStream;
import java.lang.reflect.Proxy;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.sql.Connection;
import java.sql.DatabaseMetaData;
import java.sql.DriverManager;
import java.sql.SQLException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicReference;
import javax.sql.DataSource;
import org.postgresql.ds.PGSimpleDataSource;
import pgfence.FenceException.*;

/** Slips that a user may make, and that a client may: each was one once, or is one elsewhere. */
@SuppressWarnings("try")
final class SlipTests extends Case {
    SlipTests() throws SQLException {}

    public void severalNamesAreTheSameInEitherForm() throws Exception {
        try (Lease lease = fence.lease(List.of("order:7", "order:8")).acquire()) {
            equal(lease.names(), List.of("order:7", "order:8"));
            equal(fence.lease("order:8", "order:7").tryAcquire().isPresent(), false);
            equal(fence.lease(List.of("order:8")).tryAcquire().isPresent(), false);
        }
        thrown(IllegalArgumentException.class, () -> fence.lease());
        thrown(IllegalArgumentException.class, () -> fence.lease(List.of()));
        thrown(NullPointerException.class, () -> fence.lease("order:7", null));
    }

    public void aTtlThatIsTooShortIsRefusedByName() throws Exception {
        for (long ms : new long[] {0, -1000, 99}) {
            IllegalArgumentException error =
                    thrown(IllegalArgumentException.class, () -> fence.lease("order:7").ttl(Duration.ofMillis(ms)));
            equal(error.getMessage(), "a ttl of " + ms + " ms: it takes at least 100 ms");
            thrown(IllegalArgumentException.class, () -> fence.claim("SELECT 'a'").ttl(Duration.ofMillis(ms)));
            thrown(IllegalArgumentException.class, () -> fence.leadership("chief").ttl(Duration.ofMillis(ms)));
        }
        thrown(IllegalArgumentException.class, () -> fence.lease("order:7").waiting(Duration.ofSeconds(-1)));
        fence.lease("order:7").ttl(Duration.ofMillis(100));
    }

    public void aDatabaseWithoutTheExtensionSaysSo() throws Exception {
        Properties elsewhere = new Properties();
        elsewhere.setProperty("options", "-c search_path=pg_catalog");
        Fence lost = new Fence(URL, elsewhere);
        for (Body body : new Body[] {
            () -> lost.lease("order:7").acquire(),
            () -> lost.lease("order:7").waiting(Duration.ofSeconds(1)).acquire(),
            () -> lost.lease("order:7", "order:8").acquire(),
            () -> lost.resume("order:7", 1, LONG),
            () -> lost.claim("SELECT 'order:7'").acquire(1),
            () -> lost.adopt("order:7", 33).acquire(),
            () -> fence.inSchema("nowhere").lease("order:7").acquire(),
        }) {
            NotInstalled error = thrown(NotInstalled.class, body);
            equal(error.getMessage().contains("not installed"), true);
            equal(error.getMessage().contains("search_path"), true);
            equal(error.getMessage().contains("inSchema"), true);
        }
        try (Lease lease = lease("order:7"); Connection on = DriverManager.getConnection(URL, elsewhere)) {
            thrown(NotInstalled.class, () -> lease.guard(on).run(c -> {}));
        }
    }

    /** A connection of another driver's. */
    private static Connection foreign() {
        DatabaseMetaData data = (DatabaseMetaData) Proxy.newProxyInstance(SlipTests.class.getClassLoader(),
                new Class<?>[] {DatabaseMetaData.class}, (self, method, arguments) -> "H2");
        return (Connection) Proxy.newProxyInstance(SlipTests.class.getClassLoader(), new Class<?>[] {Connection.class},
                (self, method, arguments) -> method.getName().equals("getMetaData") ? data : null);
    }

    private static DataSource source(Connection connection) {
        return (DataSource) Proxy.newProxyInstance(SlipTests.class.getClassLoader(), new Class<?>[] {DataSource.class},
                (self, method, arguments) -> connection);
    }

    public void aWrongObjectIsRefusedByName() throws Exception {
        thrown(IllegalArgumentException.class, () -> new Fence((DataSource) null));
        for (String url : new String[] {"jdbc:mysql://localhost/shop", "localhost:5432", null}) {
            IllegalArgumentException error = thrown(IllegalArgumentException.class, () -> new Fence(url));
            equal(error.getMessage().contains("jdbc:postgresql:"), true);
        }
        for (Connection wrong : new Connection[] {foreign(), null}) {
            IllegalArgumentException error = thrown(IllegalArgumentException.class,
                    () -> new Fence(source(wrong)).lease("order:7").acquire());
            equal(error.getMessage().contains("DataSource of PostgreSQL's driver"), true);
            try (Lease lease = lease("order:7")) {
                thrown(IllegalArgumentException.class, () -> lease.guard(wrong).run(c -> {}));
                thrown(IllegalArgumentException.class, () -> lease.present(wrong).run(c -> {}));
            }
        }
    }

    public void aTransactionThatTheWorkRolledBackDoesNotLookLikeACommit() throws Exception {
        try (Lease lease = lease("order:7"); Connection on = DriverManager.getConnection(URL)) {
            for (Guarded guarded : new Guarded[] {lease.guard(on), lease.present(on), lease.guard(on).releasing()}) {
                SQLException error = thrown(SQLException.class, () -> guarded.run(c -> {
                    run(c, "UPDATE orders SET status = 'undone'");
                    run(c, "ROLLBACK");
                }));
                equal(error.getSQLState(), "25P01");
                error = thrown(SQLException.class, () -> guarded.run(c -> {
                    thrown(SQLException.class, () -> run(c, "SELECT 1/0"));
                }));
                equal(error.getSQLState(), "25P02");
            }
            equal(status(), "new");
            lease.check();
            // The code that began it ends it; that it has failed is told all the same.
            on.setAutoCommit(false);
            SQLException error = thrown(SQLException.class, () -> lease.guard(on).run(c -> {
                thrown(SQLException.class, () -> run(c, "SELECT 1/0"));
            }));
            equal(error.getSQLState(), "25P02");
            on.rollback();
        }
    }

    public void anAcquireThatIsBrokenOffIsATimeout() throws Exception {
        try (ServerSocket silent = new ServerSocket(0, 50, InetAddress.getLoopbackAddress())) {
            Fence nobody = new Fence("jdbc:postgresql://127.0.0.1:" + silent.getLocalPort() + "/shop?user=me&sslmode=disable");
            for (Duration wait : new Duration[] {Duration.ZERO, Duration.ofMillis(100)}) {
                LeaseRequest request = nobody.lease("order:7").ttl(Duration.ofMillis(900)).waiting(wait);
                thrown(AcquireTimeout.class, request::acquire);
            }
        }
        // The same on a connection that was open before.
        try (Way way = new Way()) {
            Fence far = new Fence(way.url());
            Lease held = far.lease("other").ttl(Duration.ofMillis(900)).acquire();
            way.isSilent = true;
            for (Duration wait : new Duration[] {Duration.ZERO, Duration.ofMillis(100)}) {
                LeaseRequest request = far.lease("order:7").ttl(Duration.ofMillis(900)).waiting(wait);
                thrown(AcquireTimeout.class, request::acquire);
            }
            equal(held.loss().reason(), Reason.DEADLINE);
        }
        // What was broken off may have been granted all the same, for its ttl.
        comesTrue(() -> value(HELD).equals("0"));
    }

    public void aLeaseThatIsForgottenIsNotRenewedForEver() throws Exception {
        AtomicReference<LeaseLost> told = new AtomicReference<>();
        fence.lease("order:7").ttl(Duration.ofSeconds(2)).onLost(told::set).acquire();
        comesTrue(() -> {
            System.gc();
            return told.get() != null;
        });
        equal(told.get().reason(), Reason.DEADLINE);
        comesTrue(() -> fence.lease("order:7").tryAcquire().map(next -> {
            next.release();
            return true;
        }).orElse(false));
    }

    public void aLeaseThatIsInUseIsNotForgotten() throws Exception {
        try (Connection on = DriverManager.getConnection(URL)) {
            fence.lease("order:7").ttl(Duration.ofSeconds(2)).acquire().guard(on).releasing().run(c -> {
                System.gc();
                run(c, "SELECT pg_sleep(4)");
                run(c, "UPDATE orders SET status = 'paid'");
            });
        }
        equal(status(), "paid");
    }

    public void whatIsToldOfALossMayBlock() throws Exception {
        CountDownLatch blocks = new CountDownLatch(1);
        try (Lease kept = fence.lease("other").ttl(Duration.ofSeconds(2)).acquire()) {
            LeaseRequest request = fence.lease("order:7").ttl(Duration.ofSeconds(2)).onLost(loss -> {
                try {
                    blocks.await();
                } catch (InterruptedException nobodyDoes) {
                    Thread.currentThread().interrupt();
                }
            });
            Lease lost = request.acquire();
            value("SELECT lease_revoke('order:7')");
            comesTrue(() -> lost.loss() != null);
            kept.sleep(Duration.ofSeconds(4));
            blocks.countDown();
        }
    }

    public void aRenewalThatIsAskedForDuringAnotherIsNotForgotten() throws Exception {
        try (Lease lease = lease("order:7"); Connection other = DriverManager.getConnection(URL)) {
            other.setAutoCommit(false);
            value(other, "SELECT lease_renew('order:7', " + lease.token() + ")");
            lease.beatSoon();
            comesTrue(() -> value("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'").equals("1"));
            Thread renews = started(lease::renew);
            comesTrue(() -> renews.getState() == Thread.State.TIMED_WAITING);
            other.rollback();
            comesTrue(() -> !renews.isAlive());
        }
    }

    public void manyThatAreLockedHoldUpNoOther() throws Exception {
        List<Lease> free = new ArrayList<>();
        List<Lease> locked = new ArrayList<>();
        for (int number = 0; number < 300; number++) {
            (number % 3 == 0 ? free : locked).add(fence.lease("many:" + number).ttl(Duration.ofSeconds(6)).acquire());
        }
        try (Connection other = DriverManager.getConnection(URL)) {
            other.setAutoCommit(false);
            for (Lease lease : locked) {
                value(other, "SELECT lease_renew('" + lease.names().get(0) + "', " + lease.token() + ")");
            }
            for (Lease lease : locked) {
                comesTrue(() -> lease.loss() != null);
            }
            free.get(0).sleep(Duration.ofSeconds(3));
        }
        free.forEach(Lease::close);
        comesTrue(() -> value(HELD).equals("0"));
    }

    public void aReleaseThatMustWaitHoldsUpNoOther() throws Exception {
        try (Connection other = DriverManager.getConnection(URL)) {
            Lease waits = lease("order:7");
            try (Lease kept = fence.lease("other").ttl(Duration.ofSeconds(2)).acquire()) {
                other.setAutoCommit(false);
                value(other, "SELECT lease_renew('order:7', " + waits.token() + ")");
                Thread releases = started(waits::release);
                kept.sleep(Duration.ofSeconds(4));
                equal(releases.isAlive(), true);
                other.rollback();
                releases.join();
            }
        }
    }

    /** A way to the server on which a request to cancel comes late: its sender believes that it has come. */
    private static final class Way implements AutoCloseable {
        private static final int CANCEL_REQUEST = 16;

        private final ServerSocket door = new ServerSocket(0, 50, InetAddress.getLoopbackAddress());
        private final PGSimpleDataSource place = source();
        private final List<Socket> sockets = new ArrayList<>();
        private final CountDownLatch isAsked = new CountDownLatch(1);
        /** Once it is asked to cancel, or while it is silent, nothing comes back from the server. */
        volatile boolean isSilent;
        private byte[] request;

        Way() throws IOException {
            Sql.daemon("door", this::open).start();
        }

        String url() {
            return "jdbc:postgresql://127.0.0.1:%d/%s?user=%s&sslmode=disable&gssEncMode=disable".formatted(
                    door.getLocalPort(), place.getDatabaseName(), place.getUser());
        }

        private Socket server() throws IOException {
            return new Socket("127.0.0.1", place.getPortNumbers()[0]);
        }

        private void open() {
            try {
                while (true) {
                    Socket client = door.accept();
                    byte[] first = client.getInputStream().readNBytes(4);
                    int length = first[2] * 256 + first[3];
                    byte[] begin = new byte[length];
                    System.arraycopy(first, 0, begin, 0, 4);
                    client.getInputStream().readNBytes(begin, 4, length - 4);
                    if (length == CANCEL_REQUEST) {
                        request = begin;
                        isSilent = true;
                        isAsked.countDown();
                        client.close();
                        continue;
                    }
                    Socket server = server();
                    server.getOutputStream().write(begin);
                    synchronized (sockets) {
                        sockets.addAll(List.of(client, server));
                    }
                    pass(client, server, false);
                    pass(server, client, true);
                }
            } catch (IOException closed) {
                // The test is over.
            }
        }

        private void pass(Socket from, Socket to, boolean isAnswer) {
            Sql.daemon("pass", () -> {
                byte[] bytes = new byte[65536];
                try (from; to; InputStream in = from.getInputStream()) {
                    for (int count = in.read(bytes); count >= 0; count = in.read(bytes)) {
                        while (isAnswer && isSilent && !from.isClosed()) {
                            Thread.sleep(10);
                        }
                        to.getOutputStream().write(bytes, 0, count);
                    }
                } catch (IOException | InterruptedException closed) {
                    // One of them has ended.
                }
            }).start();
        }

        void arrives() throws Exception {
            isAsked.await();
            try (Socket server = server()) {
                server.getOutputStream().write(request);
                server.getInputStream().read();
            }
        }

        @Override
        public void close() throws IOException {
            door.close();
            synchronized (sockets) {
                for (Socket socket : sockets) {
                    socket.close();
                }
            }
        }
    }

    /** The grant came while the cancel was on its way: its release must not be what is cancelled. */
    public void aCancelThatComesLateDoesNotEndTheRelease() throws Exception {
        try (Way way = new Way(); Connection other = DriverManager.getConnection(URL)) {
            Fence far = new Fence(way.url());
            Lease first = lease("order:7");
            Thread waits = started(() -> thrown(InterruptedException.class,
                    () -> far.lease("order:7").ttl(LONG).waiting(LONG).acquire()));
            comesTrue(() -> value(WAITING).equals("1"));
            waits.interrupt();
            way.isAsked.await();
            first.release();
            comesTrue(() -> value("SELECT count(*) FROM lease_info('order:7') WHERE state = 'held'").equals("1"));
            // It is granted, and its release has to wait.
            other.setAutoCommit(false);
            run(other, "LOCK TABLE fence.lease");
            way.isSilent = false;
            comesTrue(() -> value("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
                    + "AND query LIKE 'SELECT lease_release%'").equals("1"));
            way.arrives();
            other.rollback();
            waits.join();
            comesTrue(() -> value("SELECT count(*) FROM lease_info('order:7') WHERE state = 'held'").equals("0"));
        }
    }
}
