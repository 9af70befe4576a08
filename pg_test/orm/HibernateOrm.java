// Hibernate on a managed table: it fails where something else comes of a step than it says.

import java.sql.SQLException;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.Callable;
import javax.persistence.Column;
import javax.persistence.Entity;
import javax.persistence.Id;
import javax.persistence.MappedSuperclass;
import javax.persistence.Table;
import javax.persistence.Version;
import org.hibernate.Session;
import org.hibernate.SessionFactory;
import org.hibernate.StaleObjectStateException;
import org.hibernate.cfg.Configuration;
import pgfence.Fence;
import pgfence.FenceException.Refused;
import pgfence.Lease;
import pgfence.Options;

public class HibernateOrm {
    /** Knows nothing of the fence, and has a version of its own beside it. */
    @MappedSuperclass
    public abstract static class Row {
        @Id int id;
        @Column int v;
        @Version int version;
    }

    @Entity(name = "Plain")
    @Table(name = "orders")
    public static class Plain extends Row {}

    /** Maps the fence, and writes back what it has read. */
    @Entity(name = "Mapped")
    @Table(name = "orders")
    public static class Mapped extends Row {
        @Column Long fence;
    }

    static SessionFactory factory;

    public static void main(String[] arguments) throws Exception {
        String url = "jdbc:postgresql://127.0.0.1:" + arguments[0] + "/" + arguments[1] + "?user=postgres";
        factory = new Configuration()
                .addAnnotatedClass(Plain.class)
                .addAnnotatedClass(Mapped.class)
                .setProperty("hibernate.connection.driver_class", "org.postgresql.Driver")
                .setProperty("hibernate.connection.url", url)
                .setProperty("hibernate.dialect", "org.hibernate.dialect.PostgreSQLDialect")
                .setProperty("hibernate.temp.use_jdbc_metadata_defaults", "false")
                .buildSessionFactory();
        Fence fence = new Fence(url);
        Options options = new Options().ttl(Duration.ofMinutes(5));
        Lease held = fence.lease("order:1", options);
        for (Class<? extends Row> kind : List.of(Plain.class, Mapped.class)) {
            String who = kind.getSimpleName().toLowerCase();
            Row row = read(kind);
            step(who + ": the holder saves", () -> save(row, 1, held), "done");
            step(who + ": it saves the same object again", () -> save(row, 2, held), "done");
            Row older = read(kind);
            step(who + ": it saves what it has read", () -> save(read(kind), 3, held), "done");
            step(who + ": it saves an older version", () -> save(older, 4, held), "another version");
            step(who + ": who has only read saves", () -> save(read(kind), 5, null), "PF002");
        }
        same("the token", held.token(), read(Mapped.class).fence);
        query("SELECT 1 FROM lease_revoke('order:1')");
        Lease next = fence.lease("order:1", options);
        step("the stale worker saves the right version", () -> save(read(Plain.class), 6, held), "PF004");
        step("the next holder saves", () -> save(read(Plain.class), 7, next), "done");
        same("the row", "7 8", read(Plain.class).v + " " + read(Plain.class).version);
        fence.close();
        factory.close();
    }

    /** In a transaction of Hibernate's, under the lease if there is one. */
    static Void save(Row row, int v, Lease under) {
        Session session = factory.openSession();
        try {
            session.beginTransaction();
            row.v = v;
            session.update(row);
            if (under == null) {
                session.flush();
            } else {
                session.doWork(connection -> under.guard(connection, () -> session.flush()));
            }
            session.getTransaction().commit();
            return null;
        } catch (RuntimeException error) {
            session.getTransaction().rollback();
            throw error;
        } finally {
            session.close();
        }
    }

    static <T extends Row> T read(Class<T> kind) {
        Session session = factory.openSession();
        try {
            return kind.cast(session.get(kind, 1));
        } finally {
            session.close();
        }
    }

    static void query(String sql) {
        Session session = factory.openSession();
        session.beginTransaction();
        session.createSQLQuery(sql).list();
        session.getTransaction().commit();
        session.close();
    }

    static void same(String what, Object wanted, Object is) {
        if (!wanted.equals(is)) {
            throw new AssertionError(what + ": " + is);
        }
    }

    static void step(String what, Callable<?> work, String comes) throws Exception {
        String outcome = "done";
        try {
            work.call();
        } catch (StaleObjectStateException error) {
            outcome = "another version";
        } catch (RuntimeException error) {
            outcome = stateOf(error);
        }
        same(what, comes, outcome);
    }

    static String stateOf(Throwable error) {
        if (error instanceof Refused refused) {
            return refused.sqlState();
        }
        return error instanceof SQLException sql ? sql.getSQLState() : stateOf(error.getCause());
    }
}
