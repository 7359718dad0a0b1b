//! Opening an image, and what to say where that fails.

use crate::error::RbdError;
use crate::ffi::{Cluster, Image, Library, NoLibrary, Pool};
use crate::name::{PoolAndImage, RbdName};
use crate::options::RbdOptions;
use std::io;
use std::time::Duration;
use zebu_storage::Access;

/// The user that librados takes where none is named.
const DEFAULT_USER: &str = "admin";
/// Settings by which requests end, and the values with which they would not.
const TIMEOUTS: [&str; 2] = ["rados_osd_op_timeout", "rados_mon_op_timeout"];
const CONNECT_TIMEOUT: &str = "client_mount_timeout";
/// The value of that one that Ceph has where nothing is said: five minutes.
const DEFAULT_CONNECT_TIMEOUT: f64 = 300.0;

/// An image, with its cluster's number and its pool's.
pub(crate) struct Opened {
    pub(crate) library: &'static Library,
    pub(crate) image: Image,
    pub(crate) fsid: String,
    pub(crate) pool: i64,
    /// The time that a request has.
    pub(crate) timeout: Duration,
}

/// Whether the image is there, or is to be made first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Existence {
    IsThere,
    /// With this size in bytes.
    Make(u64),
}

/// Opens an image. Waits for the cluster, no longer than the options say.
pub(crate) fn open(
    name: &RbdName,
    access: Access,
    existence: Existence,
    options: &RbdOptions,
) -> Result<Opened, RbdError> {
    let shown = name.to_string();
    let fail = |errno, reason: String| RbdError::new(&shown, errno, reason);
    name.check().map_err(|reason| fail(libc::EINVAL, reason))?;
    let library = Library::get().map_err(|error| fail(libc::ENOSYS, no_library(&error)))?;
    let cluster = Cluster::new(library, name.user.as_deref())
        .map_err(|errno| fail(errno, format!("librados refuses to begin: {}", errno_text(errno))))?;
    let has_conf = configure(&cluster, name, options).map_err(|(errno, reason)| fail(errno, reason))?;
    let seconds = |key| cluster.get(key).ok().and_then(|value| value.parse().ok()).unwrap_or(0.0);
    let timeout = Duration::try_from_secs_f64(seconds(TIMEOUTS[0]))
        .ok()
        .filter(|timeout| !timeout.is_zero())
        .unwrap_or(options.timeout);
    let connecting = seconds(CONNECT_TIMEOUT);
    cluster.connect().map_err(|errno| fail(errno, not_connected(errno, name, has_conf, connecting)))?;
    let fsid = cluster.fsid().map_err(|errno| fail(errno, in_words(errno, name, timeout)))?;
    let pool = cluster
        .pool(&name.pool, &name.namespace)
        .map_err(|(_, errno)| fail(errno, no_pool(errno, name, timeout)))?;
    if let Existence::Make(size) = existence {
        pool.create(&name.image, size).map_err(|errno| fail(errno, not_made(errno, name, timeout)))?;
    }
    let number = pool.id();
    let is_writable = access == Access::ReadWrite && name.snapshot.is_none();
    let image = Image::open(pool, &name.image, name.snapshot.as_deref(), is_writable)
        .map_err(|(pool, errno)| fail(errno, not_opened(errno, name, pool, is_writable, timeout)))?;
    Ok(Opened { library, image, fsid, pool: number, timeout })
}

/// Reads the configuration, and sets what the name says and what lets requests end. True if there was a file.
fn configure(cluster: &Cluster, name: &RbdName, options: &RbdOptions) -> Result<bool, (i32, String)> {
    for key in ["log_to_stderr", "err_to_stderr"] {
        // Failures are told by whoever opens the disk.
        let _ = cluster.set(key, "false");
    }
    let read = cluster.read_file(name.conf.as_deref());
    let has_conf = match (read, &name.conf) {
        (Ok(()), _) => true,
        (Err(libc::ENOENT), None) => false,
        (Err(errno), Some(path)) => {
            return Err((errno, format!("the configuration '{path}' can't be read: {}", errno_text(errno))));
        }
        (Err(errno), None) => {
            let reason = errno_text(errno);
            return Err((
                errno,
                format!("Ceph's configuration can't be read: {reason} (:conf=FILE names another)"),
            ));
        }
    };
    for (key, value) in &name.settings {
        cluster.set(key, value).map_err(|errno| {
            let reason = match errno {
                libc::ENOENT => format!("Ceph has no setting '{key}'"),
                _ => format!("the setting '{key}' can't be '{value}': {}", errno_text(errno)),
            };
            (libc::EINVAL, reason)
        })?;
    }
    let is_given = |key: &str| name.settings.iter().any(|(given, _)| given.replace([' ', '-'], "_") == key);
    let number = |key: &str| cluster.get(key).ok().and_then(|value| value.parse::<f64>().ok());
    let set = |key: &str, value: &str| {
        let failed =
            |errno| (errno, format!("the setting '{key}' can't be '{value}': {}", errno_text(errno)));
        cluster.set(key, value).map_err(failed)
    };
    for key in TIMEOUTS {
        if !is_given(key) && number(key).is_none_or(|seconds| seconds <= 0.0) {
            set(key, &whole_seconds(options.timeout))?;
        }
    }
    if !is_given(CONNECT_TIMEOUT) && number(CONNECT_TIMEOUT).is_none_or(|set| set >= DEFAULT_CONNECT_TIMEOUT)
    {
        set(CONNECT_TIMEOUT, &whole_seconds(options.connect_timeout))?;
    }
    if !is_given("rbd_cache") {
        // A write whose data stays in the cache of this process would be answered before it may fail.
        set("rbd_cache", "false")?;
    }
    Ok(has_conf)
}

/// Seconds, at least one: none would mean that there is no end.
fn whole_seconds(duration: Duration) -> String {
    duration.as_secs().max(1).to_string()
}

/// The user in Ceph's words.
fn user(name: &RbdName) -> String {
    format!("client.{}", name.user.as_deref().unwrap_or(DEFAULT_USER))
}

fn errno_text(errno: i32) -> String {
    let text = io::Error::from_raw_os_error(errno).to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

fn no_library(error: &NoLibrary) -> String {
    match error {
        NoLibrary::StaticProgram => {
            "rbd: needs librbd, which a statically linked program can't load: use a zebu that is linked dynamically".to_owned()
        }
        NoLibrary::NotFound(reason) => {
            format!("librbd can't be loaded (package librbd1): {reason}")
        }
    }
}

/// Reasons that every call may have.
fn in_words(errno: i32, name: &RbdName, timeout: Duration) -> String {
    match errno {
        libc::ETIMEDOUT => {
            format!("the cluster has not answered for {} s: are its daemons up?", timeout.as_secs_f64())
        }
        libc::EPERM | libc::EACCES => format!(
            "{} may not do that: give it the capabilities 'profile rbd' for mon and osd, or name another user with :id=USER",
            user(name)
        ),
        _ => errno_text(errno),
    }
}

fn not_connected(errno: i32, name: &RbdName, has_conf: bool, seconds: f64) -> String {
    if !has_conf && !name.settings.iter().any(|(key, _)| key.starts_with("mon")) {
        let reason = errno_text(errno);
        return format!(
            "there is no configuration of Ceph (/etc/ceph/ceph.conf; :conf=FILE names another): {reason}"
        );
    }
    let user = user(name);
    match errno {
        libc::ETIMEDOUT => {
            format!("no monitor of the cluster has answered for {seconds} s: is it up, is its address right?")
        }
        libc::ENOENT | libc::EOPNOTSUPP => format!(
            "there is no key of {user}: name its file with :keyring=FILE, or another user with :id=USER"
        ),
        libc::EACCES | libc::EPERM | libc::EINVAL => {
            format!(
                "the cluster does not let {user} in: is its key right (:keyring=FILE), is it the right user (:id=USER)?"
            )
        }
        _ => format!("could not connect to the cluster: {}", errno_text(errno)),
    }
}

fn no_pool(errno: i32, name: &RbdName, timeout: Duration) -> String {
    match errno {
        libc::ENOENT => format!("there is no pool '{}'", name.pool),
        _ => in_words(errno, name, timeout),
    }
}

fn not_made(errno: i32, name: &RbdName, timeout: Duration) -> String {
    let place = PoolAndImage(name);
    match errno {
        libc::EEXIST => {
            format!("there is an image already: 'rbd rm {place}' removes it, convert -n writes into it")
        }
        libc::ENOENT => no_namespace(name),
        _ => in_words(errno, name, timeout),
    }
}

fn no_namespace(name: &RbdName) -> String {
    format!("there is no namespace '{}' in the pool '{}'", name.namespace, name.pool)
}

fn not_opened(errno: i32, name: &RbdName, pool: Pool, is_writable: bool, timeout: Duration) -> String {
    match (errno, &name.snapshot) {
        (libc::ENOENT, Some(snapshot)) => {
            // Which of the two is missing.
            match Image::open(pool, &name.image, None, false) {
                Ok(image) => {
                    image.close();
                    format!("the image has no snapshot '{snapshot}' ('rbd snap ls' lists them)")
                }
                Err(_) => no_image(name),
            }
        }
        (libc::ENOENT, None) => no_image(name),
        (libc::EPERM | libc::EACCES, _) if is_writable => {
            format!("{}, or open it for reading only", in_words(errno, name, timeout))
        }
        (libc::EROFS, _) => {
            "the image can't be written: another holds its lock for good, or it is a mirror's".to_owned()
        }
        _ => in_words(errno, name, timeout),
    }
}

fn no_image(name: &RbdName) -> String {
    let namespace = match name.namespace.as_str() {
        "" => String::new(),
        namespace => format!(", namespace '{namespace}'"),
    };
    format!("there is no image '{}' in the pool '{}'{namespace}", name.image, name.pool)
}

/// Why a request was given up, in words.
pub(crate) fn given_up(errno: i32, timeout: Duration) -> String {
    match errno {
        libc::ETIMEDOUT => format!("the cluster has not answered for {} s", timeout.as_secs_f64()),
        libc::ESHUTDOWN => {
            "the cluster does not take this client any more: another has broken the image's lock and had it excluded".to_owned()
        }
        libc::EROFS => "another client holds the image's lock for good".to_owned(),
        libc::ENOENT => "the image, or its snapshot, is not there any more".to_owned(),
        _ => errno_text(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_name_what_is_missing_and_the_remedy() {
        let mut name = RbdName::new("p", "i");
        name.user = Some("u".to_owned());
        let wait = Duration::from_secs(7);
        for (reason, words) in [
            (no_pool(libc::ENOENT, &name, wait), &["pool 'p'"][..]),
            (no_image(&name), &["'i'", "'p'"]),
            (not_made(libc::EEXIST, &name, wait), &["rbd rm p/i", "-n"]),
            (in_words(libc::ETIMEDOUT, &name, wait), &["7 s"]),
            (in_words(libc::EACCES, &name, wait), &["client.u", "profile rbd", ":id="]),
            (not_connected(libc::ENOENT, &name, true, 3.0), &["key of client.u", "keyring"]),
            (not_connected(libc::ETIMEDOUT, &name, true, 3.0), &["monitor", "3 s"]),
            (not_connected(libc::ENOENT, &name, false, 3.0), &["/etc/ceph/ceph.conf", ":conf="]),
            (no_library(&NoLibrary::StaticProgram), &["statically", "dynamically"]),
            (no_library(&NoLibrary::NotFound("no such file".to_owned())), &["librbd1", "no such file"]),
            (given_up(libc::ETIMEDOUT, wait), &["7 s"]),
        ] {
            for word in words {
                assert!(reason.contains(word), "{reason}: {word}");
            }
        }
    }
}
