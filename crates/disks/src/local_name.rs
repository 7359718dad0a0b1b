//! Names of images on the command line: paths of local files. What QEMU takes for a protocol is refused, so that a name
//! never leads to another place than it does there.

use crate::secrets_in_names::without_secrets;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use zebu_oci::OciName;
use zebu_rbd::RbdName;
use zebu_remote::http::HttpUrl;
use zebu_remote::nbd::NbdAddress;
use zebu_store::StoreName;
use zebu_store::points::PointName;

/// The protocol for local files.
const FILE: &[u8] = b"file:";

/// The protocol that QEMU sees in a name: what stands before a colon, unless a slash comes first.
fn protocol(name: &OsStr) -> Option<&OsStr> {
    let bytes = name.as_bytes();
    let end = bytes.iter().position(|byte| matches!(byte, b':' | b'/'))?;
    (bytes[end] == b':').then(|| OsStr::from_bytes(&bytes[..end]))
}

/// The file that `name` leads to; `file:` at its start is left out, as QEMU does.
///
/// # Errors
/// The name has another protocol.
pub fn local_path(name: &OsStr) -> Result<PathBuf, String> {
    if let Some(rest) = name.as_bytes().strip_prefix(FILE) {
        let rest = OsStr::from_bytes(rest);
        return Ok(if protocol(rest).is_some() { plain(rest) } else { PathBuf::from(rest) });
    }
    match protocol(name) {
        None => Ok(PathBuf::from(name)),
        Some(_) if name.to_str().is_some_and(is_on_server) => {
            Err("it is a disk on a server, and a local file is needed here".to_owned())
        }
        Some(protocol) => Err(format!(
            "Unknown protocol '{}' (there are file, nbd, http, https, s3, gs, az, rbd, oci, oci-layout and store; a file of this very name is '{}')",
            protocol.display(),
            without_secrets(plain(name).as_os_str())
        )),
    }
}

/// Whether a name has a protocol that leads to a server.
pub fn is_on_server(name: &str) -> bool {
    NbdAddress::is_name(name)
        || HttpUrl::is_name(name)
        || StoreName::is_name(name)
        || RbdName::is_name(name)
        || OciName::is_name(name)
        || PointName::is_name(name)
}

/// The same for a name that is written into an image.
pub fn local_name(name: &str) -> Result<String, String> {
    // Only ASCII was taken away or put in front.
    local_path(OsStr::new(name)).map(|path| path.to_string_lossy().into_owned())
}

/// A name with a colon, as a path that has no protocol.
fn plain(name: &OsStr) -> PathBuf {
    let mut path = b"./".to_vec();
    path.extend(name.as_bytes());
    PathBuf::from(OsString::from_vec(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocols_are_refused_with_the_name_of_a_local_file() {
        for (name, protocol) in [
            ("gluster:x", "gluster"),
            ("json:{}", "json"),
            ("fat:rw:dir", "fat"),
            ("host_device:/dev/sda", "host_device"),
            (":x", ""),
            ("12:30.img", "12"),
        ] {
            let error = local_path(OsStr::new(name)).unwrap_err();
            assert!(error.contains(&format!("protocol '{protocol}'")), "{error}");
            assert!(error.contains(&format!("'./{name}'")), "{error}");
            assert_eq!(local_path(OsStr::new(&format!("./{name}"))), Ok(PathBuf::from(format!("./{name}"))));
        }
    }

    #[test]
    fn disks_on_servers_are_told_from_files() {
        for name in
            ["nbd://host/x", "nbd+unix:///?socket=s", "nbd:host:1", "https://h/x", "s3://b/o", "rbd:p/i"]
        {
            assert!(local_path(OsStr::new(name)).unwrap_err().contains("on a server"), "{name}");
            assert_eq!(local_path(OsStr::new(&format!("./{name}"))), Ok(PathBuf::from(format!("./{name}"))));
        }
    }

    #[test]
    fn paths_stay_as_they_are() {
        for name in ["a", "/a:b", "./a:b", "dir/a:b", "", "."] {
            assert_eq!(local_path(OsStr::new(name)), Ok(PathBuf::from(name)));
        }
        assert_eq!(local_name("file:dir/a"), Ok("dir/a".to_owned()));
        assert_eq!(local_name("file:///a"), Ok("///a".to_owned()));
        assert_eq!(local_name("file:a:b"), Ok("./a:b".to_owned()));
    }
}
