//! Profiles in the files of AWS's tools (`~/.aws/credentials`, `~/.aws/config`), as far as S3 needs them.

use crate::environment::Environment;
use configparser::ini::{Ini, IniDefault};
use std::io;
use std::path::PathBuf;

/// The largest file that is read, in bytes.
const LARGEST: u64 = 1 << 20;

/// A profile.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Profile {
    pub(crate) access_key_id: Option<String>,
    pub(crate) secret_access_key: Option<String>,
    pub(crate) session_token: Option<String>,
    pub(crate) region: Option<String>,
    pub(crate) endpoint_url: Option<String>,
    pub(crate) role_arn: Option<String>,
    pub(crate) role_session_name: Option<String>,
    pub(crate) web_identity_token_file: Option<String>,
}

/// Keys of a profile that give credentials in ways that are not supported.
const REFUSED: [&str; 5] =
    ["sso_session", "sso_start_url", "credential_process", "source_profile", "credential_source"];

impl Profile {
    /// Reads the profile that `AWS_PROFILE` names, or `default`, from both files.
    ///
    /// # Errors
    /// A file can't be read, the profile that was named is in none, or gets its credentials in a way that is not supported.
    pub(crate) fn read(environment: Environment<'_>) -> Result<Self, String> {
        let named = environment.get("AWS_PROFILE").or_else(|| environment.get("AWS_DEFAULT_PROFILE"));
        let name = named.as_deref().unwrap_or("default");
        let home = environment.get("HOME").map(PathBuf::from);
        let file = |variable: &str, beside: &str| {
            let given = environment.get(variable).map(PathBuf::from);
            given.or_else(|| home.as_ref().map(|home| home.join(".aws").join(beside)))
        };
        let mut profile = Self::default();
        let mut is_known = false;
        let mut refused = None;
        let files = [
            (file("AWS_SHARED_CREDENTIALS_FILE", "credentials"), vec![name.to_owned()]),
            (file("AWS_CONFIG_FILE", "config"), vec![format!("profile {name}"), name.to_owned()]),
        ];
        for (path, sections) in files {
            let Some(path) = path else { continue };
            let Some(text) = read(&path)? else { continue };
            let ini = parse(&text).map_err(|reason| format!("'{}': {reason}", path.display()))?;
            // Only the default profile stands in the second file without the word.
            let sections = if name == "default" { &sections[..] } else { &sections[..1] };
            for section in sections.iter().filter(|section| ini.get_map_ref().contains_key(*section)) {
                is_known = true;
                profile.add(&ini, section);
                refused = refused.or(REFUSED.into_iter().find(|key| ini.get(section, key).is_some()));
            }
        }
        if let Some(named) = &named
            && !is_known
        {
            return Err(format!(
                "there is no profile '{named}' (AWS_PROFILE) in ~/.aws/credentials and ~/.aws/config"
            ));
        }
        if let Some(key) = refused
            && profile.access_key_id.is_none()
            && profile.web_identity_token_file.is_none()
        {
            return Err(format!(
                "the profile '{name}' gets its credentials by '{key}', which is not supported: `aws configure \
                 export-credentials --format env` prints variables that are"
            ));
        }
        Ok(profile)
    }

    /// Takes what is not there yet.
    fn add(&mut self, ini: &Ini, section: &str) {
        let get =
            |key: &str| ini.get(section, key).map(|value| without_comment(&value)).filter(|v| !v.is_empty());
        if self.access_key_id.is_none() && self.secret_access_key.is_none() {
            // These belong together, so they are of one file.
            self.access_key_id = get("aws_access_key_id");
            self.secret_access_key = get("aws_secret_access_key");
            self.session_token = get("aws_session_token");
        }
        let take = |place: &mut Option<String>, key: &str| {
            if place.is_none() {
                *place = get(key);
            }
        };
        take(&mut self.region, "region");
        take(&mut self.role_arn, "role_arn");
        take(&mut self.role_session_name, "role_session_name");
        take(&mut self.web_identity_token_file, "web_identity_token_file");
        let services = get("services");
        let of_service =
            services.and_then(|name| nested(ini, &format!("services {name}"), "s3", "endpoint_url"));
        let of_s3 = nested(ini, section, "s3", "endpoint_url");
        if self.endpoint_url.is_none() {
            self.endpoint_url = of_service.or(of_s3).or_else(|| get("endpoint_url"));
        }
    }
}

impl std::fmt::Debug for Profile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Profile")
    }
}

fn read(path: &std::path::Path) -> Result<Option<String>, String> {
    let fail = |error: io::Error| Err(format!("'{}' can't be read: {error}", path.display()));
    match std::fs::metadata(path) {
        Ok(found) if found.len() > LARGEST => return Err(format!("'{}' is too long", path.display())),
        Ok(_) => {}
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) => return fail(error),
    }
    std::fs::read_to_string(path).map_or_else(fail, |text| Ok(Some(text)))
}

/// Lines that go on in the next are those of nested settings: a value of lines.
fn parse(text: &str) -> Result<Ini, String> {
    let mut defaults = IniDefault::default();
    defaults.comment_symbols = vec!['#', ';'];
    defaults.inline_comment_symbols = Some(Vec::new());
    defaults.delimiters = vec!['='];
    defaults.case_sensitive = true;
    defaults.multiline = true;
    let mut ini = Ini::new_from_defaults(defaults);
    // The text of an error would have the line in it.
    ini.read(text.to_owned()).map_err(|_| "it is no file of profiles".to_owned())?;
    Ok(ini)
}

/// A comment stands behind a blank.
fn without_comment(value: &str) -> String {
    let end = [" #", " ;", "\t#", "\t;"].iter().filter_map(|mark| value.find(mark)).min();
    value[..end.unwrap_or(value.len())].trim().to_owned()
}

/// The setting `key` below `group` of a section.
fn nested(ini: &Ini, section: &str, group: &str, key: &str) -> Option<String> {
    let lines = ini.get(section, group)?;
    let found = lines.lines().filter_map(|line| line.split_once('=')).find(|(name, _)| name.trim() == key);
    found.map(|(_, value)| without_comment(value)).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn profile_of(files: &[(&str, &str)], variables: &[(&str, &str)]) -> Result<Profile, String> {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join(".aws")).unwrap();
        for (name, text) in files {
            std::fs::write(home.path().join(".aws").join(name), text).unwrap();
        }
        let mut all: HashMap<&str, String> = variables.iter().map(|(k, v)| (*k, (*v).to_owned())).collect();
        all.insert("HOME", home.path().to_str().unwrap().to_owned());
        Profile::read(Environment(&|name| all.get(name).cloned()))
    }

    #[test]
    fn both_files_are_read_and_nested_settings_are_no_settings() {
        let credentials = "[default]\naws_access_key_id = A\naws_secret_access_key=s/e+c=ret ; mine\n\n[other]\n\
                           aws_access_key_id=B\naws_secret_access_key=b\naws_session_token=t==\n";
        let config = "# all\n[default]\nregion = eu-west-1\ns3 =\n  region = no\n  endpoint_url = http://h:9/ # here\n\
                      [profile other]\nregion=us-east-2\nservices = mine\n[services mine]\ns3 =\n  endpoint_url = https://o\n";
        let files = [("credentials", credentials), ("config", config)];
        let found = profile_of(&files, &[]).unwrap();
        assert_eq!(
            (found.access_key_id.as_deref(), found.secret_access_key.as_deref()),
            (Some("A"), Some("s/e+c=ret"))
        );
        assert_eq!(
            (found.region.as_deref(), found.endpoint_url.as_deref()),
            (Some("eu-west-1"), Some("http://h:9/"))
        );
        let other = profile_of(&files, &[("AWS_PROFILE", "other")]).unwrap();
        assert_eq!(
            (other.session_token.as_deref(), other.region.as_deref()),
            (Some("t=="), Some("us-east-2"))
        );
        assert_eq!(other.endpoint_url.as_deref(), Some("https://o"));
        assert_eq!(format!("{found:?}"), "Profile");
    }

    #[test]
    fn no_files_are_no_profile_and_a_missing_one_is_named() {
        assert_eq!(profile_of(&[], &[]), Ok(Profile::default()));
        assert!(profile_of(&[], &[("AWS_PROFILE", "x")]).unwrap_err().contains("'x'"));
        assert!(profile_of(&[("config", "[x]\nregion=r\n")], &[("AWS_PROFILE", "x")]).is_err());
        let sso = [("config", "[default]\nsso_session = me\n")];
        assert!(profile_of(&sso, &[]).unwrap_err().contains("sso_session"));
        let odd = profile_of(&[("credentials", "[default\naws_secret_access_key = hidden\n")], &[]);
        assert!(odd.is_err_and(|error| !error.contains("hidden")));
    }
}
