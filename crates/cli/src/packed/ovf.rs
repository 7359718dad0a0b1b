//! The disks that an OVF descriptor names.

/// The names of the files of its disks, each once.
pub(crate) fn disk_files(text: &str) -> Vec<String> {
    let elements = elements(text);
    let of = |wanted: &'static str| {
        elements
            .iter()
            .filter(move |(name, _)| name.rsplit(':').next() == Some(wanted))
            .map(|(_, rest)| *rest)
    };
    let mut found = Vec::new();
    for disk in of("Disk") {
        let Some(reference) = attribute(disk, "fileRef") else { continue };
        let file = of("File").find(|file| attribute(file, "id").as_deref() == Some(&reference));
        if let Some(name) = file.and_then(|file| attribute(file, "href"))
            && !found.contains(&name)
        {
            found.push(name);
        }
    }
    found
}

/// The names of elements, and the rest of their tags.
fn elements(text: &str) -> Vec<(&str, &str)> {
    text.split('<')
        .skip(1)
        .filter_map(|tag| tag.split_once('>').map(|(tag, _)| tag))
        .filter_map(|tag| {
            let end = tag.find(|c: char| c.is_whitespace() || c == '/')?;
            Some(tag.split_at(end))
        })
        .collect()
}

/// An attribute by its name without its prefix.
fn attribute(tag: &str, wanted: &str) -> Option<String> {
    let mut rest = tag;
    while let Some((before, after)) = rest.split_once('=') {
        let name = before.trim().rsplit(|c: char| c.is_whitespace() || c == ':').next()?;
        let after = after.trim_start();
        let quote = after.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        let (value, behind) = after[1..].split_once(quote)?;
        if name == wanted {
            let plain = value.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"");
            return Some(plain.replace("&apos;", "'").replace("&amp;", "&"));
        }
        rest = behind;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disks_of_a_descriptor_are_found_whatever_its_prefixes() {
        let text = r#"<?xml version="1.0"?><Envelope xmlns:ovf="x"><References>
            <File ovf:href="a &amp; b.vmdk" ovf:id="file1" ovf:size="5"/><ovf:File href='notes.txt' id='n'/>
            <File ovf:id="file2" ovf:href="second.vmdk"/></References>
            <DiskSection><Info>disks</Info><Disk ovf:diskId="d1" ovf:fileRef="file1"/>
            <ovf:Disk ovf:capacity="1" fileRef="file2"></ovf:Disk><Disk ovf:diskId="empty"/></DiskSection></Envelope>"#;
        assert_eq!(disk_files(text), ["a & b.vmdk", "second.vmdk"]);
        assert!(disk_files("").is_empty() && disk_files("<Disk fileRef=").is_empty());
        assert!(disk_files("<Disk fileRef=\"x\"/><File id=\"x\" href=\"/etc/passwd").is_empty());
    }
}
